// Package archtest holds the tests of the repository's own shape: which directories exist, who may import whom (also
// through other packages), what a service's root may do, how packages are named and documented, and what no file may
// contain.
//
// It owns those rules and nothing else: it has no code that runs in a program. The linter checks the direct import
// walls too, and shows violations in an editor; a comment in the code cannot switch the tests of this package off.
//
// It is a package of its own because its tests read the whole repository as text and syntax: they would have no place
// in any one of the packages that they check.
package archtest
