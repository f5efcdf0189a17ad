// Package certificates has the drills of certificates that are refused: expired while the node was away, of a former
// authority, or of one that the ingress does not trust.
package certificates
