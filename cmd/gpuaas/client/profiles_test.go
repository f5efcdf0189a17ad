package client_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

func TestProfiles(t *testing.T) {
	f := mesh(t)
	version := &recoveryv1.ProfileVersion{
		Profile: &commonv1.Profile{
			Name: "site", Version: 4, ApiUrl: "agents.example.org:8443", RecoveryUrl: "https://enroll.example.org",
			Fingerprint: strings.Repeat("ab", 32), CaBundlePem: []byte("pem"),
		},
		Phase: recoveryv1.ProfilePhase_PROFILE_PHASE_ANNOUNCED, Since: at(1), By: "ada", Reason: "moved", Nodes: 3,
		DefaultName: true,
	}
	always(f, "ListProfiles", &readmodelv1.ListProfilesResponse{Items: []*recoveryv1.ProfileVersion{version}})
	always(f, "GetStatus", &readmodelv1.GetStatusResponse{Components: []*readmodelv1.ComponentStatus{{
		Name: "configured_profile", State: commonv1.PartState_PART_STATE_DOWN, Detail: "site is not taken: api_url",
		Reason: "profile_unverified", NextAction: "correct the file",
	}}})
	got := call(t, "profiles", "list").wants(t, 0)
	for _, want := range []string{
		"site (default)", "announced", "agents.example.org:8443", "3",
		"site is not taken: api_url", "profile_unverified", "correct the file",
	} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%q is missing in\n%s", want, got.out)
		}
	}
	got = call(t, "profiles", "list", "--name", "site", "-o", "json").wants(t, 0)
	for _, want := range []string{`"phase": "announced"`, `"version": 4`, `"nodes": 3`, `"next_page_token": ""`} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%s is missing in\n%s", want, got.out)
		}
	}
	got = call(t, "profiles", "show", "site", "4", "-o", "json").wants(t, 0)
	for _, want := range []string{`"phase": "announced"`, `"version": 4`, `"ca_bundle_pem": "cGVt"`} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%s is missing in\n%s", want, got.out)
		}
	}
	if got = call(t, "profiles", "show", "site", "4", "--bundle").wants(t, 0); got.out != "pem" {
		t.Errorf("the bundle is printed as %q", got.out)
	}
	call(t, "profiles", "show", "site", "4", "--recovery-bundle").wants(t, 5) // it was not sent
	call(t, "profiles", "show", "site", "5").wants(t, 3)                      // no such version
	if req := sent[*readmodelv1.ListProfilesRequest](f); req[len(req)-1].GetName() != "site" {
		t.Errorf("%v", req)
	}
	bundle := filepath.Join(t.TempDir(), "roots.pem")
	if err := os.WriteFile(bundle, []byte("pem"), 0o600); err != nil {
		t.Fatal(err)
	}
	set := []string{
		"profiles", "set", "site", "--api", "agents.example.org:8443", "--recovery", "https://enroll.example.org",
	}
	call(t, append(set, "--reason", "moved")...).wants(t, 2)                               // no trust
	call(t, append(set, "--ca-bundle", bundle)...).wants(t, 2)                             // no reason
	call(t, append(set, "--ca-bundle", bundle+".not", "--reason", "moved")...).wants(t, 2) // no such file
	call(t, "profiles", "activate", "site", "--reason", "r").wants(t, 2)                   // no version
	call(t, "profiles", "activate", "site", "four", "--reason", "r").wants(t, 2)           // no such version
	call(t, "profiles", "retire", "site", "4").wants(t, 2)                                 // no reason
	always(f, "SetProfile", &readmodelv1.SetProfileResponse{Profile: version, Pos: "p1"})
	got = call(t, append(set, "--ca-bundle", bundle, "--reason", "moved", "--newest-seen", "3")...).wants(t, 0)
	if !strings.Contains(got.err, "gpuaas profiles activate site 4") {
		t.Errorf("the next command is missing in\n%s", got.err)
	}
	if req := sent[*readmodelv1.SetProfileRequest](f); len(req) != 1 || string(req[0].GetCaBundlePem()) != "pem" ||
		req[0].GetNewestSeen() != 3 || len(req[0].GetRecoveryCaBundlePem()) != 0 {
		t.Errorf("%v", req)
	}
	always(f, "ActivateProfile", &readmodelv1.ActivateProfileResponse{Profile: version})
	call(t, "profiles", "activate", "site", "4", "--reason", "all have it").wants(t, 0)
	always(f, "RetireProfile", &readmodelv1.RetireProfileResponse{Profile: version})
	call(t, "profiles", "retire", "site", "4", "--force", "--reason", "it is closed").wants(t, 0)
	if req := sent[*readmodelv1.RetireProfileRequest](f); len(req) != 1 || !req[0].GetForce() ||
		req[0].GetVersion() != 4 {
		t.Errorf("%v", req)
	}
}
