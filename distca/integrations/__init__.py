"""Other people's trainers, one line each: what they pack is balanced over their ranks and nothing else changes."""
