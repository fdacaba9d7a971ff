"""Options and profiles of the methods, one module per method: ``Options`` and ``PROFILES``."""
