"""Tests of the documentation: links, options, commands and the example backend, without root."""
