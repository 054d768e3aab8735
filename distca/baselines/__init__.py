"""What others do, as ordinary plans, so that every comparison runs on the same runtime and is counted the same way."""
