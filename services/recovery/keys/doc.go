// Package keys owns the incidents about keys of the mesh that a replica lacks.
package keys
