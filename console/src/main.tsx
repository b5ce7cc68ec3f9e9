// The page: a bar, a place, and one view at a time, chosen by the address after #.

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { follow, get, signOut, type Session, type State } from "./api";
import { Learn } from "./pages/learn";
import { Now } from "./pages/now";
import { Replay } from "./pages/replay";
import { OneRequest } from "./pages/request";
import { Requests } from "./pages/requests";
import { SignIn } from "./pages/sign_in";
import { WhatIfPage } from "./pages/whatif";
import { Confirm } from "./parts/confirm";
import { SessionOf } from "./session";
import "./style.css";
import "./operate.css";

const PAGES: [string, string][] = [
  ["now", "Now"],
  ["requests", "Requests"],
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
  const [session, setSession] = useState<Session | null>(null);
  const look = () =>
    get<Session>("api/session")
      .then(setSession)
      .catch((problem: Error) => setLost(problem.message));
  useEffect(() => void look(), []);
  const isIn = session?.rank != null;
  useEffect(() => {
    if (!isIn) return;
    return follow(
      (next) => {
        setState(next);
        setLost("");
      },
      setLost,
      () => void look(),
    );
  }, [isIn]);
  const leave = () => {
    signOut()
      .then(() => location.reload())
      .catch((problem: Error) => setLost(problem.message));
  };
  const page = address.split(/[/?]/)[0]!;
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
        <Tools state={state} session={session} leave={leave} />
      </header>
      {lost && (
        <p class="lost" role="alert">
          Nothing heard from the gateway: {lost}
        </p>
      )}
      <SessionOf.Provider value={session}>
        <main>
          {!session ? (
            <p class="empty">Waiting for the gateway…</p>
          ) : isIn ? (
            <View address={address} state={state} />
          ) : (
            <SignIn session={session} onSignedIn={look} />
          )}
        </main>
        <Confirm />
      </SessionOf.Provider>
    </>
  );
}

function View({ address, state }: { address: string; state: State | null }) {
  const [page, ...rest] = address.split("?")[0]!.split("/");
  switch (page) {
    case "requests":
      return rest.length ? (
        <OneRequest id={decodeURIComponent(rest.join("/"))} />
      ) : (
        <Requests address={address} />
      );
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

const OPEN_HINT =
  "This gateway has no operator keys: whoever opens this page may change it.";

interface ToolsProps {
  state: State | null;
  session: Session | null;
  leave: () => void;
}

function Tools({ state, session, leave }: ToolsProps) {
  const theme = () => {
    const root = document.documentElement;
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem("prfaas-theme", root.dataset.theme);
    // Charts read their colours when they are made.
    location.reload();
  };
  return (
    <div class="tools">
      {state && (
        <span class="model" title={`policy ${state.policy}`}>
          {state.model}
        </span>
      )}
      {session?.operator && (
        <>
          <span class="who" title="your name and rank, from the deployment file">
            {session.operator}, {session.rank === "view" ? "may look" : "may change"}
          </span>
          <button type="button" onClick={leave}>
            Sign out
          </button>
        </>
      )}
      {session && !session.needs_key && session.rank && <span title={OPEN_HINT}>no key needed</span>}
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
