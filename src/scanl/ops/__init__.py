from scanl.ops.linear_scan import linear_scan as linear_scan
