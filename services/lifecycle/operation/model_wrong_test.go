package operation

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/services/lifecycle/provision"
)

// guilty is the panic value with which a test of the model ends that has found a difference.
type guilty struct{ text string }

type accuser struct{}

func (accuser) Fatalf(format string, args ...any) { panic(guilty{fmt.Sprintf(format, args...)}) }

// A model with a wrong rule must be found to differ from the product.
func TestTheModelSeesAWrongRule(t *testing.T) {
	g := newStage(t, nil)
	for plant, script := range map[string]func(a *scenario){
		"": func(a *scenario) {
			a.stays(time.Minute)
			if !a.s.WithoutInstance {
				t.Errorf("its box is there: %+v", a.s)
			}
			a.request(request{verb: askRecreate})
			a.request(request{verb: askReplace, key: "k1"})
			a.request(request{verb: askRecreate, key: "k1"})
			a.runsOut()
			if a.s.State != "active" || a.s.Epoch != 2 {
				t.Errorf("in the end %+v", a.s)
			}
		},
		"retry_release always": func(a *scenario) {
			a.runsOut()
			a.request(request{verb: askRetryRelease})
		},
		"force_release always": func(a *scenario) {
			a.runsOut()
			a.request(request{verb: askForceRelease})
		},
		"reset always": func(a *scenario) { a.request(request{verb: askReset}) },
		"retry without reset": func(a *scenario) {
			a.mu.Lock()
			a.faults[provision.StepDeploy+"/do"], a.troubled = failsBefore, true
			a.mu.Unlock()
			a.runsOut()
			a.request(request{verb: askRetry})
		},
		"the watchdog joins": func(a *scenario) {
			a.stays(time.Minute)
			a.request(request{verb: askReplace})
		},
		"recreate keeps epoch": func(a *scenario) {
			a.runsOut()
			a.request(request{verb: askRecreate})
		},
	} {
		t.Run(plant, func(t *testing.T) {
			a := &scenario{
				stage: g, rt: accuser{}, rules: rules{plant: plant}, name: "demo", where: byProcess,
				keys: map[string]string{}, counts: map[string]int{},
			}
			a.tenant = g.tenant()
			if err := g.pool.QueryRow(t.Context(), `SELECT id::text FROM lifecycle.tenant WHERE name = $1`,
				a.tenant).Scan(&a.tenantID); err != nil {
				t.Fatal(err)
			}
			defer a.leave()
			defer func() {
				found, _ := recover().(guilty)
				if (found.text == "") != (plant == "") {
					t.Errorf("the model says %q", found.text)
				}
				if plant != "" {
					first, _, _ := strings.Cut(found.text, "\n")
					t.Logf("caught: %s", first)
				}
			}()
			a.request(request{verb: askCreate})
			script(a)
		})
	}
}

// A teardown that is late has nothing to go back to: it is stuck, and its claims stay.
func TestALateDecommissionIsStuck(t *testing.T) {
	g := newStage(t, nil)
	a := &scenario{stage: g, rt: t, name: "demo", where: byProcess, keys: map[string]string{}, counts: map[string]int{}}
	a.tenant = g.tenant()
	if err := g.pool.QueryRow(t.Context(), `SELECT id::text FROM lifecycle.tenant WHERE name = $1`,
		a.tenant).Scan(&a.tenantID); err != nil {
		t.Fatal(err)
	}
	a.request(request{verb: askCreate})
	a.runsOut()
	a.request(request{verb: askDecommission})
	a.troubled = true
	g.jump(2 * time.Hour)
	a.runsOut()
	if a.s.State != "stuck" {
		t.Fatalf("it is %s", a.s.State)
	}
	a.request(request{verb: askRetryUndo})
	a.runsOut()
	if a.s.State != "decommissioned" {
		t.Fatalf("it is %s after it was tried again", a.s.State)
	}
}
