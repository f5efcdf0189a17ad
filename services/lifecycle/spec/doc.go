// Package spec has the specs of workspaces: what may be asked for (the catalogue of plans, images, regions and
// placements), the input of a run, and the sealing of the secret environment values that are stored in both.
package spec
