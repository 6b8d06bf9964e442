"""The one reader of data files: tables, lines, folders of images, arrays, rows from Python."""
