"""What people see: charts, pixels, and the templates of pages."""
