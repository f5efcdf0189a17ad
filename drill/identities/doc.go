// Package identities has the drills of identities: fenced, copied, and registered more than once.
package identities
