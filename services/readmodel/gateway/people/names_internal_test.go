package people

import (
	"slices"
	"testing"
	"time"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// TestNoPersonHasTheNameOfAService creates people with the names by which services act, through the API and by Admit:
// an audit entry, or an incident that such a person closed, would count as the service's. Other names are accepted,
// even if they begin like one.
func TestNoPersonHasTheNameOfAService(t *testing.T) {
	const unmet = "name: it is the name by which a service acts"
	for name, reserved := range map[string]bool{
		"lifecycle": true, "nodeapi": true, "readmodel": true, "recovery": true, // services
		"watchdog": true, "auto_recovery": true, // loops of recovery, which request operations and close incidents
		"recovery2": false, "ann.watchdog": false, "ann": false,
	} {
		a := Admission{Name: name, Roles: []string{"viewer"}, Life: time.Hour}
		if err := a.validate(); (err != nil) != reserved {
			t.Errorf("Admit checks %s: %v", name, err)
		}
		if reserved {
			if token, err := Admit(t.Context(), nil, a); err == nil || token != "" { // refused before the database is asked
				t.Errorf("%s is admitted", name)
			}
		}
		refusal, refused := fault.As(checkAdmission(a, &readmodelv1.CreatePersonRequest{Name: name}))
		if refused != reserved || refused && !slices.Contains(refusal.Unmet, unmet) {
			t.Errorf("CreatePerson checks %s: %v", name, refusal)
		}
	}
}
