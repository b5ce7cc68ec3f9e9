// The page: a bar, a place, and one view at a time, chosen by the address after #.

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { follow, operatorKey, setOperatorKey, type State } from "./api";
import { Incidents, OneIncident } from "./pages/incidents";
import { Learn } from "./pages/learn";
import { Now } from "./pages/now";
import { Replay } from "./pages/replay";
import { OneRequest } from "./pages/request";
import { Requests } from "./pages/requests";
import { WhatIfPage } from "./pages/whatif";
import "./style.css";

const PAGES: [string, string][] = [
  ["now", "Now"],
  ["requests", "Requests"],
  ["incidents", "Incidents"],
  ["what-if", "What if"],
  ["replay", "Replay"],
  ["learn", "Learn"],
];

function useAddress(): string {
  const [address, setAddress] = useState(location.hash.slice(2) || "now");
  useEffect(() => {
    const changed = () => setAddress(location.hash.slice(2) || "now");
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return address;
}

function App() {
  const address = useAddress();
  const [state, setState] = useState<State | null>(null);
  const [lost, setLost] = useState("");
  useEffect(
    () =>
      follow((next) => {
        setState(next);
        setLost("");
      }, setLost),
    [],
  );
  const page = address.split("/")[0]!;
  return (
    <>
      <header>
        <a class="brand" href="#/now">
          prfaas
        </a>
        <nav aria-label="Pages">
          {PAGES.map(([name, title]) => (
            <a href={`#/${name}`} aria-current={page === name ? "page" : undefined}>
              {title}
              {name === "now" && state && state.alarms.length > 0 && (
                <span class="badge" title="alarms">
                  {state.alarms.length}
                </span>
              )}
            </a>
          ))}
        </nav>
        <Tools state={state} />
      </header>
      {lost && (
        <p class="lost" role="alert">
          Nothing heard from the gateway: {lost}
        </p>
      )}
      <main>
        <View address={address} state={state} />
      </main>
    </>
  );
}

function View({ address, state }: { address: string; state: State | null }) {
  const [page, ...rest] = address.split("/");
  switch (page) {
    case "requests":
      return rest.length ? (
        <OneRequest id={decodeURIComponent(rest.join("/"))} />
      ) : (
        <Requests state={state} />
      );
    case "incidents":
      return rest.length ? <OneIncident id={rest.join("/")} /> : <Incidents state={state} />;
    case "what-if":
      return <WhatIfPage />;
    case "replay":
      return <Replay />;
    case "learn":
      return <Learn />;
    default:
      return <Now state={state} />;
  }
}

const KEY_HINT =
  "Operator key. A gateway without operator_keys asks for none: whoever opens this page may change it.";

function Tools({ state }: { state: State | null }) {
  const theme = () => {
    const root = document.documentElement;
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem("prfaas-theme", root.dataset.theme);
    // Charts read their colours when they are made.
    location.reload();
  };
  const key = () => {
    const given = prompt("Operator key; kept for this tab, empty forgets it", operatorKey());
    if (given !== null) {
      setOperatorKey(given.trim());
      location.reload();
    }
  };
  return (
    <div class="tools">
      {state && (
        <span class="model" title={`policy ${state.policy}`}>
          {state.model}
        </span>
      )}
      <button type="button" onClick={key} title={KEY_HINT}>
        {operatorKey() ? "operator" : state ? "no key needed" : "enter key"}
      </button>
      <button type="button" onClick={theme} title="Light or dark" aria-label="Light or dark">
        ◐
      </button>
    </div>
  );
}

function isDark(): boolean {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

const chosen = localStorage.getItem("prfaas-theme");
if (chosen) document.documentElement.dataset.theme = chosen;
render(<App />, document.getElementById("root")!);
