// Package scratch makes temporary directories that are found and removed after the sudden death of their owner.
//
// A directory counts as ours only by its name, its owner's uid and a marked lock file in it, and its owner as dead only
// if the kernel grants us that lock. A pid in a file proves neither. Guarantees: a directory whose owner lives is never
// removed, nor one that something else made; of several processes that sweep at once, one removes.
package scratch
