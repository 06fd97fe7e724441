"""One file a step: what fills the pane, in the order of the checklist. A step joins in the tuple of frame/pane.py."""
