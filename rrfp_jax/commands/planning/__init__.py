"""What ``rrfp plan`` and ``rrfp profile`` do: costs and their files, reports, pictures."""
