"""Methods: what is attended to and from where, all behind one seam."""
