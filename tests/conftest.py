"""Its place puts this folder on the path, so that every test finds ``ranks`` and ``tiny``."""
