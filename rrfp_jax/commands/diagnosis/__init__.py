"""What ``rrfp doctor`` looks at: one file for each kind of thing, each check a function that returns a finding."""
