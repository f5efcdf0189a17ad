package pki_test

import (
	"crypto/x509"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/pki"
)

func TestLifeAndLead(t *testing.T) {
	tests := map[string]struct{ span, life, lead time.Duration }{
		"eight hours, dated back": {8*time.Hour + time.Minute, 8 * time.Hour, time.Minute},
		"the policy's least":      {80 * time.Second, 20 * time.Second, 20 * time.Second / 6},
		"six minutes":             {7 * time.Minute, 6 * time.Minute, time.Minute},
		"not dated back":          {20 * time.Second, 20 * time.Second, 20 * time.Second / 6},
		"ended before it began":   {-time.Second, -time.Second, 0},
	}
	begin := time.Unix(1_800_000_000, 0)
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			leaf := &x509.Certificate{NotBefore: begin, NotAfter: begin.Add(tt.span)}
			if got := pki.Life(leaf); got != tt.life {
				t.Errorf("Life = %v, want %v", got, tt.life)
			}
			if got := pki.Lead(tt.life); got != tt.lead {
				t.Errorf("Lead = %v, want %v", got, tt.lead)
			}
		})
	}
}
