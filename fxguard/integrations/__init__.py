"""fxguard in other people's trainers: one file for each, imported by nobody but its users."""
