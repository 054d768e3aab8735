"""Examples may be slow where other work shares the machine, so none has a deadline."""

from hypothesis import settings

settings.register_profile("distca", deadline=None)
settings.load_profile("distca")
