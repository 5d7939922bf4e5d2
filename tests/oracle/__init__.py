"""What some hundreds of runs read, as hashes: no change of the code may change one of them."""
