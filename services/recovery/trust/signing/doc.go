// Package signing decides with which issuer a replica of recovery signs: with the one that the database names, read
// again before each certificate. Which one the database names is decided by rotations, in package trust.
package signing
