package place

// Candidates are the places that a path may mean.
var Candidates = candidates

// Ambiguous gives the first part of a path that could be seen from the root.
var Ambiguous = ambiguous
