"""One file for each step of the checklist, which fills the pane. A new step is added to the tuple in frame/pane.py."""
