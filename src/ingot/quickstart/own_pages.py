"""Pages written for the quickstart crawl: other languages, bad manners, a list of contacts, and spam.

Each is there so that one stage of the data pipeline meets something to drop.
"""

_GERMAN = """
Die Bibliothek lädt ihre Daten in kleinen Schritten, damit auch ein gewöhnlicher Rechner mit großen Sammlungen arbeiten
kann. Wer eine Datei zum ersten Mal öffnet, sollte wissen, dass nichts davon verändert wird. Alle Ergebnisse landen in
einem neuen Ordner, und ein abgebrochener Lauf wird beim nächsten Mal einfach fortgesetzt. Für jede verworfene Seite
steht ein Grund im Protokoll, so dass man jede Entscheidung nachlesen und bei Bedarf ändern kann.
"""
_FRENCH = """
La bibliothèque lit les données par petits morceaux, afin qu'un ordinateur ordinaire puisse traiter de grandes
collections. La première ouverture d'un fichier ne modifie rien. Tous les résultats sont écrits dans un nouveau
dossier, et un travail interrompu reprend là où il s'était arrêté. Chaque page rejetée reçoit une raison précise dans
le journal, ce qui permet de relire chaque décision et de la corriger si nécessaire.
"""
_SPANISH = """
La biblioteca lee los datos en trozos pequeños para que un ordenador normal pueda trabajar con colecciones grandes.
Abrir un archivo por primera vez no cambia nada. Todos los resultados se guardan en una carpeta nueva, y un trabajo
interrumpido continúa donde se quedó. Cada página descartada recibe un motivo en el registro, de modo que se puede
revisar cada decisión y cambiarla cuando haga falta.
"""
_RANT = """
I have had it with this damn parser and with the idiot who wrote it. Every time that I feed it a long file it stops in
the middle and tells me that the end was not expected. What kind of moron would call that an error message? The manual
is crap from the first page to the last, and the examples in it do not even run. My manager said that I should be
patient with the authors, but I think that they are a bunch of idiots with too much time. If you have to use this crap
at work, then I am sorry for you and for the whole damn team.
"""
_FLAME = """
Only an imbecile would sort a list that is already sorted, and yet here we are with this crappy function. The answer to
my report was that it works as designed, which is bollocks and they know it. I told them that the damn loop runs twice
and that any jackass with a clock can measure it. They closed the thread and went home to be pissed about something
else. Have fun with your slow program, you morons, because that is what you have earned with this attitude.
"""
_CONTACTS = """
The list of maintainers is kept for people who have to reach somebody about a release. Write to anna@guide.example,
bela@guide.example, carla@guide.example and dario@guide.example for the north. Write to emma@guide.example,
farid@guide.example, greta@guide.example and hugo@guide.example for the south. The office with the number
212-555-0147 is open in the morning. The office with the number 212-555-0163 is open in the evening. If nobody answers
to your message, then try ines@guide.example or jonas@guide.example and be patient.
"""


def _page(title: str, text: str, language: str = "en") -> str:
    return (
        f'<!DOCTYPE html><html lang="{language}"><head><meta charset="utf-8"><title>{title}</title></head><body>'
        f'<header><a href="/">Community</a></header><main><article><h1>{title}</h1>'
        f"<p>{text.strip()}</p></article></main><footer>Posted by a member.</footer></body></html>"
    )


_SPAM = " ".join(["Click here for the best deal on cheap tickets, the best deal of the year."] * 40)
_HOST = "community.ingot.invalid"
OWN_PAGES: tuple[tuple[str, str, str], ...] = (
    (_HOST, "/de/bibliothek.html", _page("Die Bibliothek", _GERMAN, "de")),
    (_HOST, "/fr/bibliotheque.html", _page("La bibliothèque", _FRENCH, "fr")),
    (_HOST, "/es/biblioteca.html", _page("La biblioteca", _SPANISH, "es")),
    (_HOST, "/forum/parser.html", _page("Parser again", _RANT)),
    (_HOST, "/forum/sorting.html", _page("About sorting", _FLAME)),
    (_HOST, "/contacts.html", _page("Maintainers", _CONTACTS)),
    (_HOST, "/offers.html", _page("Offers", _SPAM)),
    (_HOST, "/empty.html", "<html><head><title>Soon</title></head><body><script>start()</script></body></html>"),
)
