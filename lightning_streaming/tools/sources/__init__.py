"""Where samples come from: one file per kind of source.

source          what every source answers: pieces, schema, rows, places
location        where the source is: a copy of what a URL names
detect          which kind a location is; opens it
digests         which content a source has, so that work goes on with the same
files           the files that a location names
strict_json     JSON in which no key is there twice
values          values of a source to what an encoding takes
columns         which columns are written, and in which encodings; rows to samples
json_lines      one JSON object a line
delimited       CSV and TSV
parquet         Parquet, by row groups
arrow           schemas and batches of Arrow, which parquet and huggingface share
huggingface     a Hugging Face dataset saved to disk
webdataset      a WebDataset tar set
image_folder    a folder of images in a folder per class
text_folder     a folder of text files
"""
