// Package codec decides whether a message may be accepted: whether its body can be decoded, whether its texts can be
// stored and read, and in which words a refusal names what is wrong with a field.
//
// The codecs accept every body, since connect would send the error of a codec to the client as it is; Problem returns
// the refusal of a message afterwards. A refusal does not quote the body, which may hold a secret.
package codec
