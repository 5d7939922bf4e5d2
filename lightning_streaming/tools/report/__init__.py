"""Charts, image files and HTML pages that several tools show."""
