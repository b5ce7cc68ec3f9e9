// Who uses the page, for every part of it.

import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { Session } from "./api";

export const SessionOf = createContext<Session | null>(null);

/** Whether this browser may change something, and as whom. */
export function useOperator(): { mayChange: boolean; who: string } {
  const session = useContext(SessionOf);
  return {
    mayChange: session?.rank === "change",
    who: session?.operator ? `operator ${session.operator}` : "whoever opens this page (no key needed)",
  };
}
