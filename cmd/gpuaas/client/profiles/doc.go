// Package profiles has the commands about the profiles of nodes: their endpoints and trust, in versions.
//
// It reads the trust of a profile from files and sends it; recovery decides whether a version is taken.
package profiles
