"""The ``netplugin`` command line, built on ``netplugin.client``."""
