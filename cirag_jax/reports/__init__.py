"""What people look at: the trace viewer, figures."""
