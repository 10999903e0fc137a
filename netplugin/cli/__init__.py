"""The command ``netplugin``: thin commands over ``netplugin.client``."""
