"""The tier of a site in an S3 bucket: sealed packs of blocks that several pool nodes share."""
