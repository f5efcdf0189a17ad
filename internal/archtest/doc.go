// Package archtest holds the tests of the repository's own shape: which
// directories exist, who may import whom (also through other packages), what a
// service's root may do, how packages are named and documented, and what no
// file may contain.
//
// It owns those rules and nothing else: it has no code that runs in a program.
// The linter knows the direct import walls too, and shows them in an editor;
// what is here cannot be switched off by a comment.
package archtest
