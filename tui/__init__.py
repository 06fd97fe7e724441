"""The terminal interface: the checklist as screens. It reads and starts what appliance/service offers, and decides
nothing itself."""
