// Package bundle owns the archive that an operator brings to the host of a node: the endpoints and the trust of the
// node's profile, an environment file with a token for this node, and package metadata.
//
// An archive is a gzip'd tar of five files. manifest.json names the node and has the digest of each other file;
// signature.json has the signature of recovery's service certificate over the manifest, with that certificate's chain.
//
//	manifest.json  signature.json  node-agent.env  ca-bundle.crt  recovery-ca-bundle.crt
//
// Guarantees: Read accepts an archive as a whole or refuses it with fault bundle_invalid, which says what is wrong; it
// writes nothing, and the memory that it takes is bounded whatever the archive expands to. An archive that Read accepts
// is whole and unaltered since its manifest was written. Who wrote the manifest, only Verify or the digest of the whole
// archive tells. Whether the token is still good, only recovery decides.
package bundle
