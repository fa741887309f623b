"""Names of what an item of the bulk kernel carries from warp to warp."""

FACTS = 64                                     # items whose facts are kept: two blocks of 32 lanes
SLOT, POS, FLUSH, ROW, HEAD, TILE = range(6)   # an item's integers; slot -1 is a padded row
DT, A, D = range(3)                            # its floats: dt + dt_bias, A, D where it is tied
DECAY, C_SCALE = range(2)                      # the scorer's floats, per stage
WARP_ROWS = 16                                 # state rows of a consumer warp: those of one product
