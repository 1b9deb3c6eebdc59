"""Jobs side by side: in several processes of a machine, and in parts of a run that several machines share."""
