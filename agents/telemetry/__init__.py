"""What the agent reports of itself: metrics, and events with their streams."""
