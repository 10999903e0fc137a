"""The ``netplugin`` command line, built on ``netplugin.api.client``."""
