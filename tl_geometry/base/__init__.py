"""What every other package stands on: errors, argument checks, linear algebra, intervals, masked
rows, sums that merge, frozen results and their files. It imports no other package."""
