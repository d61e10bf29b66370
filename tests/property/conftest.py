"""Makes the short settings the default of this folder."""

from hypothesis import settings

from tests.property.profiles import SHORT

settings.register_profile("tokenloom", SHORT)
settings.load_profile("tokenloom")
