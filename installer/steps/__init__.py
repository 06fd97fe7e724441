"""The steps of an install, one file a phase: look (writes nothing), stage (touches nothing that runs), activate."""
