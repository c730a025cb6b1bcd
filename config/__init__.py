"""Config files: copy one and change it. run/settings.py reads them and documents each setting."""
