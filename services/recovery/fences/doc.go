// Package fences decides when lifecycle is sent the fence of a node, and when a fence counts as acknowledged.
//
// A fence is sent until lifecycle has acknowledged it: by every replica of recovery, after every restart, and again
// after a failure. One that is sent twice is harmless. If lifecycle has applied a later fence than recovery knows, the
// fence of the present decision is raised above it and sent again.
//
// It decides nothing about a node and does not change its state: package identity does, and draws the fences.
package fences
