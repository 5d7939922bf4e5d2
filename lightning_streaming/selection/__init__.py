"""Which samples are read: conditions, fractions and joins, evaluated once per node and kept."""
