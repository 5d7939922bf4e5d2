"""The browser pages of datasets and runs, and the server that shows them to one user."""
