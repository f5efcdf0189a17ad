package dev

import "time"

// Took returns how long it took from the program's beginning until Ready was closed; zero before.
func (m *Mesh) Took() time.Duration { return m.took }
