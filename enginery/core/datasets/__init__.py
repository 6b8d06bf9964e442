"""Reading of data: tables, text lines, folders of images, arrays, and rows from Python."""
