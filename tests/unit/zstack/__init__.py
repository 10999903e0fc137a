"""The plug-in for ZStack's host agent (tools/zstack)."""
